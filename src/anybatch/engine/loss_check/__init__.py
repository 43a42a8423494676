"""The first step's check: is the loss what it was declared to be?"""
