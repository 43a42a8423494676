"""The first step's check: does the loss match its declaration?"""
